"""Wire formats shared by the packages: bucket objects, artifacts, and the bodies of the HTTP routes.

Everything here is a frozen pydantic model without torch; unknown keys are rejected.
"""
