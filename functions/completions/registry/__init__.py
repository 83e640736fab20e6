"""Keys and models in DynamoDB."""
