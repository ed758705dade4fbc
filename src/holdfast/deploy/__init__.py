"""Acting with a trained policy: `Runner`, export to ONNX and pt2."""
