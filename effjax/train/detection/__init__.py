"""Training of RT-DETR on images with boxes."""
