"""The contracts: what the ports need of other packages still does what they need it for, one test for each function."""
