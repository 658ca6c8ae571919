"""Bounds, certificates, rounding, and the attack on all of them."""

from partita.certify.attack import search_worst
from partita.certify.certificate import Assumption, Certificate, Term, Witness, model_digest
from partita.certify.grid_bounds import GridFacts, Known, grid_terms
from partita.certify.rounding import dot_product_rounding, literal_rounding
from partita.certify.scattered_bounds import ScatteredFacts, scattered_terms

__all__ = [
    "Assumption",
    "Certificate",
    "GridFacts",
    "Known",
    "ScatteredFacts",
    "Term",
    "Witness",
    "dot_product_rounding",
    "grid_terms",
    "literal_rounding",
    "model_digest",
    "scattered_terms",
    "search_worst",
]
