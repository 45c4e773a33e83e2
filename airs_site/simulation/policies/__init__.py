"""Who decides in a run: the paper's policy, simple baselines, and the service's own.

`registry` names them. A new one is a class with the methods of `engine.Policy` and a line there.
"""
