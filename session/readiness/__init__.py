"""What must be there before a model runs: a profile of the machine, a plan of the model. What is missing is made."""
