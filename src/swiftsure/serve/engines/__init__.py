"""One module per kind of system that can be served; `serve.loading` picks the one of a folder."""
