"""How rollouts and minibatches are executed. `choose.py` decides; what is computed is in `policies` and `algorithms`."""
