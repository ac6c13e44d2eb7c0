"""Stubs generated from proto/kvkeep/v1/kvkeep.proto when the package is built."""
