"""The local stack: stand-ins for API Gateway, the SageMaker runtime and a model container."""
