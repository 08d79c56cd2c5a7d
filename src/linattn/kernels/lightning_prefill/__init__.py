"""Lightning Attention prefill."""
