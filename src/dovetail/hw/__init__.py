"""Hardware: how ranks find each other, the symmetric heap, and the engines that run plans."""
