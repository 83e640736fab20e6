"""One small module per Lambda function."""
