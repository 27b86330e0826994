"""The paper's claims and those beyond it: one module for each experiment, and what some of them share."""
