"""One scenario through the simulator and through the services, each told as a list of events.

`simulator` runs policy `airs` over batches that stay as intake cut them. `services` runs intake's
rows, dispatcher, take-over, finish, completion checker and forecasts on the real database, in
virtual time: every service is given the instant, and model servers are played by a heap of events.
Both sides plan the events of one instant in the same order.

What is inherently another on the two sides is held fixed here:

- What a rater's work takes. The services learn it from samples of the queue, the simulator from
  each batch: here it is, and stays, twelve seconds a batch, whatever single workflows take.
- How old an order may be. While few workflows wait, the dispatcher makes it in each pass; so does
  the simulator here, which else believes one for a quarter of a second.
- Replicas stay where they are: who moves them is model management.
- Executors and servers take what is sent at once, and the checker runs when there is something for
  it: its five seconds, and the way of a message, are not virtual.
"""
