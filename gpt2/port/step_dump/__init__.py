"""Diagnose a training step from a dump: losses, gradients and parameters that a program in any language wrote."""
