"""`python -m scripts.sagemaker_local`: stand in for SageMaker, or check a container."""

from scripts.sagemaker_local.server import main

main()
