"""Pure decisions of model management: values and `now` in, a decision with its reason out."""
