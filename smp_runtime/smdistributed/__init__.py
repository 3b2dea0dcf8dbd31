"""SageMaker's package name, so that scripts written for its library v1 import this one.

Installed as the top-level package `smdistributed`. Nothing is implemented here: every name stands
for one of `smp_runtime`. `MIGRATION.md` says which.
"""
