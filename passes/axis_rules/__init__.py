"""What every ATen op does to axes: which output dimension is which input dimension, and along which it acts.

An op acts along an axis if an output at one place of that axis depends on inputs at another, or on where it is.
One rule per kind of op, in the module of its kind; `registry.rule_for(op)` finds it, and `walk.track_axes` applies
them to a graph. A rule gets the node and the `Tracking` and calls `track.out` with the dimensions of each output and
`track.act` for each dimension acted along. An op without a rule acts along everything it touches: what is not known
is not proven local.
"""
