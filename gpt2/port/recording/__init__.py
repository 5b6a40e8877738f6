"""Record a forward pass of any module: every operator, and which parameters produced each element."""
