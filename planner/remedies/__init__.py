"""What to do where no plan fits."""
