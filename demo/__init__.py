"""The demo behind `make demo`: one Mamba2 layer, compiled without and with the pass, compared bit by bit."""
