"""The proxy: builds it, runs it. `api` is the torch-free face; the work is done in worker processes."""
