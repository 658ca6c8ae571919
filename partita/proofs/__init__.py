"""Bounds, certificates, rounding, and the attack on all of them."""

from partita.proofs.center_values import GridFacts, Known, grid_terms
from partita.proofs.certificate import Assumption, Certificate, Term, Witness, model_digest
from partita.proofs.cover_proof import ScatteredFacts, scattered_terms
from partita.proofs.form_rounding import dot_product_rounding, literal_rounding
from partita.proofs.worst_point import search_worst

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
