"""Training on images: DenseNets, and residual networks with deformable convolutions."""
