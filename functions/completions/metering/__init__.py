"""Claims and usage records in DynamoDB."""
