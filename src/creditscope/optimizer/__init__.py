"""What the optimiser does to the credit: replay, reward scale, overshoot, update geometry, and brakes that cure it."""
