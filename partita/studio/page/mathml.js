/**
 * Formulas as MathML, which browsers draw by themselves. Each function returns the text of one element; the arguments are
 * such texts, or plain words and numbers, which become identifiers, numbers and operators by their first character.
 * Only the page's own formulas are written this way; nothing that a person types gets here.
 */

const OPERATORS = /^[^\p{L}\p{N}]/u;

/** One symbol: a number, a name or an operator. */
const atom = (part) => {
  if (part.startsWith("<")) return part;
  if (/^[\d.]/.test(part)) return `<mn>${part}</mn>`;
  return OPERATORS.test(part) && part !== "∞" ? `<mo>${part.replace("<", "&lt;").replace(">", "&gt;")}</mo>` : `<mi>${part}</mi>`;
};

/** Symbols in a row; a text with blanks is several symbols. */
export const row = (...parts) => `<mrow>${parts.flatMap((part) => (part.startsWith("<") ? [part] : part.split(" "))).map(atom).join("")}</mrow>`;
export const sub = (base, index) => `<msub>${row(base)}${row(index)}</msub>`;
export const sup = (base, power) => `<msup>${row(base)}${row(power)}</msup>`;
export const frac = (above, below) => `<mfrac>${row(above)}${row(below)}</mfrac>`;
export const root = (inside) => `<msqrt>${row(inside)}</msqrt>`;
export const sum = (index) => `<munder><mo>∑</mo>${row(index)}</munder>`;
export const max = (index) => `<munder><mi>max</mi>${row(index)}</munder>`;
/** Words in a formula; blanks at their ends stay. */
export const words = (text) => `<mtext>${text.replaceAll(" ", "\u00a0")}</mtext>`;
/** Upright bars around something: an absolute value, a length. */
export const bars = (...inside) => `<mrow><mo form="prefix" stretchy="false">|</mo>${row(...inside)}<mo form="postfix" stretchy="false">|</mo></mrow>`;

/** Between two lines of a formula. */
export const NEXT_LINE = "<next-line>";

/** The whole formula, on one line or several; `spoken` is what a screen reader says. */
export function formula(spoken, ...parts) {
  const lines = [[]];
  for (const part of parts) if (part === NEXT_LINE) lines.push([]); else lines.at(-1).push(part);
  const written = lines.map((line) => `<mtr><mtd>${row(...line)}</mtd></mtr>`).join("");
  return `<math display="block" alttext="${spoken}" aria-label="${spoken}"><mtable displaystyle="true" rowspacing="0.7em">${written}</mtable></math>`;
}
