"""Decisions of Rating Fulfillment as pure functions: values and `now` in, a decision out."""
