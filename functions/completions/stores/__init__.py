"""What pipelines keep between two events: objects in S3, rows in DynamoDB, and the ways out to other services."""
