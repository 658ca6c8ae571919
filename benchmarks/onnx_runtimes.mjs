// Runs the files of onnx_runtimes.py in onnxruntime-web's WebAssembly build. Arguments: the folder, the module.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [folder, module] = process.argv.slice(2);
const ort = await import(pathToFileURL(module).href);
ort.env.wasm.numThreads = 1;
const arrays = { float32: Float32Array, float64: Float64Array };
const session = (file) => ort.InferenceSession.create(fs.readFileSync(file), { executionProviders: ["wasm"] });

const differences = [];
for (const { file, dtype, inputs, expected } of JSON.parse(fs.readFileSync(path.join(folder, "cases.json"), "utf8"))) {
  const feed = {};
  for (const [name, [shape, numbers]] of Object.entries(inputs)) {
    feed[name] = new ort.Tensor(dtype, arrays[dtype].from(numbers), shape);
  }
  const { value } = await (await session(file)).run(feed);
  const apart = Array.from(value.data, (found, i) => Math.abs(found - expected[i]));
  const comparable = value.data.length === expected.length && apart.every(Number.isFinite);
  differences.push(comparable ? Math.max(0, ...apart) : 1e308); // JSON has no infinity
}
for (const [dtype, Numbers] of Object.entries(arrays)) {
  const bytes = fs.readFileSync(path.join(folder, `${dtype}.x`));
  const x = new Numbers(bytes.buffer, bytes.byteOffset, bytes.length / Numbers.BYTES_PER_ELEMENT);
  const pairs = new Numbers(2 * x.length);
  x.forEach((number, i) => (pairs[2 * i + 1] = number));
  const { y } = await (await session(path.join(folder, `${dtype}.onnx`))).run({ x: new ort.Tensor(dtype, pairs, [x.length, 2]) });
  fs.writeFileSync(path.join(folder, `${dtype}.y`), Buffer.from(y.data.buffer, y.data.byteOffset, y.data.byteLength));
}
console.log(JSON.stringify({ version: `onnxruntime-web ${ort.env.versions.web}, WebAssembly`, differences }));
