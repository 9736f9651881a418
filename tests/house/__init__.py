"""The house: how large the package is, how deep its imports go, and where it reaches into other packages."""
