"""One codec per container family, and the SageMaker transport."""
