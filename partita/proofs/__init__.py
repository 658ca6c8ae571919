"""What is claimed about heads, and why it is true: certificates, proofs by name, and the search for points that refute a claim."""

from partita.errors import UnsupportedError
from partita.heads.head import Head
from partita.proofs.center_values import GridFacts, grid_terms
from partita.proofs.certificate import Assumption, Certificate, Term, Witness, model_digest
from partita.proofs.cover_proof import ScatteredFacts, scattered_terms
from partita.proofs.form_rounding import LayersRounding, dot_product_rounding, layers_rounding, literal_rounding
from partita.proofs.network_proof import NetworkProof
from partita.proofs.proof import Given, Proof, Proved
from partita.proofs.proving_again import ONE_HEAD
from partita.proofs.worst_point import search_worst

PROOFS: dict[str, Proof] = {**ONE_HEAD, NetworkProof.name: NetworkProof()}


def proofs_for(head: Head) -> list[Proof]:
    """The proofs that bound how far a head of this type is from a constant, those first that are usually good."""
    found = [proof for proof in PROOFS.values() if proof.handles(head)]
    if not found:
        raise UnsupportedError(
            f"there is no proof for a {type(head).__name__}; expected a grid head or a scattered head."
        )
    return found


__all__ = [
    "PROOFS",
    "Assumption",
    "Certificate",
    "Given",
    "GridFacts",
    "LayersRounding",
    "Proof",
    "Proved",
    "ScatteredFacts",
    "Term",
    "Witness",
    "dot_product_rounding",
    "grid_terms",
    "layers_rounding",
    "literal_rounding",
    "model_digest",
    "proofs_for",
    "scattered_terms",
    "search_worst",
]
