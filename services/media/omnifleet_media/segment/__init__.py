"""Model-ready tensors: image processors of transformers, inside processor processes. Knows no store and no index."""
