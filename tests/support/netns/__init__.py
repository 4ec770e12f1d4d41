"""Several hosts on one machine, for tests of a cluster over a network: each is a network namespace with an address of
its own, and the cables between them can be cut, and can lose and delay what goes through them."""
