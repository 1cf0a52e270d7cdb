"""From a row of the table to the surrogate J and its effective credit w: advantage, weight, ratio, bound, penalty."""
