// The certified network: one ONNX file that takes its exits by itself, and the full network.

import * as ort from "./ort.wasm.min.mjs";

export const SIDE = 28;
const RUNS = 9; // per timing, of which the median counts

ort.env.wasm.numThreads = 1; // single images: threads cost more than they save
ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;

export async function load() {
  const facts = await (await fetch("facts.json")).json();
  const pixels = new Uint8Array(await (await fetch("images.bin")).arrayBuffer());
  const [early, full] = await Promise.all(
    ["early.onnx", "full.onnx"].map((file) => ort.InferenceSession.create(file)),
  );
  return new Network(facts, pixels, early, full);
}

class Network {
  constructor(facts, pixels, early, full) {
    Object.assign(this, { facts, early, full });
    const size = SIDE * SIDE;
    this.images = Array.from({ length: pixels.length / size }, (_, k) =>
      pixels.subarray(k * size, (k + 1) * size),
    );
    this.waiting = Promise.resolve(); // a session runs one image at a time
  }

  /** Return the class, exit (from 0), confidence (null at the last exit) and shares of an image. */
  classify(grey) {
    return this.inTurn(async () => this.answer(await this.early.run(this.input(grey))));
  }

  /** Return the median time of an image in both networks, in milliseconds. */
  time(grey) {
    return this.inTurn(async () => {
      const input = this.input(grey);
      const times = { early: [], full: [] };
      for (let k = 0; k < RUNS; k++) {
        for (const name of ["early", "full"]) {
          const began = performance.now();
          await this[name].run(input);
          times[name].push(performance.now() - began);
        }
      }
      return { early: median(times.early), full: median(times.full) };
    });
  }

  inTurn(work) {
    const result = this.waiting.then(work);
    this.waiting = result.catch(() => {});
    return result;
  }

  /** Normalise 28 x 28 grey values, step by step in float32 as the library does. */
  input(grey) {
    const { mean, std } = this.facts;
    const values = new Float32Array(3 * grey.length);
    for (let channel = 0; channel < 3; channel++) {
      const [middle, scale] = [Math.fround(mean[channel]), Math.fround(std[channel])];
      for (let k = 0; k < grey.length; k++) {
        const share = Math.fround(grey[k] / 255);
        values[channel * grey.length + k] = Math.fround(share - middle) / scale;
      }
    }
    return { input: new ort.Tensor("float32", values, [1, 3, SIDE, SIDE]) };
  }

  answer(found) {
    const [logits] = this.early.outputNames;
    const scores = Array.from(found[logits].data);
    const largest = Math.max(...scores);
    const weights = scores.map((score) => Math.exp(score - largest));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    const confidence = found.confidence.data[0];
    return {
      prediction: scores.indexOf(largest),
      exit: Number(found.exit.data[0]),
      confidence: Number.isNaN(confidence) ? null : confidence,
      shares: weights.map((weight) => weight / total),
    };
  }
}

function median(values) {
  return values.toSorted((a, b) => a - b)[values.length >> 1];
}
