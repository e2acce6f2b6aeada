"""The tests mirror the tree; tests/contract runs the same tests over every backend of a role."""
