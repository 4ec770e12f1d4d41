"""The front door of a cluster: takes requests, knows the workers, decides who runs what. Never imports torch."""
