"""Those we are compared with: Open MPI (from Python, and from C beside it), gloo, and plain memory copies."""
