"""Training of DenseNets and ResNets on images."""
