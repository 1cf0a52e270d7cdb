"""How the logs of trainers that are not in the test environment were made: one module per trainer, each with its
command."""
