"""What to do where no plan fits, and what a better machine would bring."""
