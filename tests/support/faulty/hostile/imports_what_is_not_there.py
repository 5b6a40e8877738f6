"""Imports a package that is not installed."""

import a_package_that_nobody_has_installed as missing


def build(checkpoint_dir):
    return missing.Model()
