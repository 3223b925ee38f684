//! Products of non-routed matrices: every form, encoding and epilogue.

use half::f16;
use horizon_kernels_cuda::args::PrefillLinearArgs;
use horizon_kernels_cuda::driver::DevicePtr;
use horizon_kernels_cuda::prefill::{LinearForm, matrix_tiles};
use horizon_kernels_cuda::tiling::{TileEncoding, tile_f16, tile_q8};

use crate::common::{Bench, Random, bits, close, sum_error};

const NULL: DevicePtr = DevicePtr(0);

/// A matrix in tiles, and its values.
struct Matrix {
    tiles: Vec<u8>,
    values: Vec<f64>,
}

/// Rows of the matrix stand as plain tiles, or row `2i` and `2i + 1` of `values` are gate and up of output `i`.
fn matrix(random: &mut Random, encoding: TileEncoding, rows: usize, columns: usize, pairs: bool) -> Matrix {
    let tiles = if pairs {
        rows.div_ceil(16)
    } else {
        matrix_tiles(rows, false)
    };
    let bytes = encoding.tile_bytes(columns);
    let mut out = Matrix {
        tiles: vec![0; tiles * bytes],
        values: vec![0.0; rows * columns],
    };
    let source = |tile: usize, r: usize| {
        if pairs {
            (tile * 8 + r % 8) * 2 + r / 8
        } else {
            tile * 16 + r
        }
    };
    let codes: Vec<i8> = (0..rows * columns)
        .map(|_| (random.below(255) as i32 - 127) as i8)
        .collect();
    let blocks = columns.div_ceil(32);
    let scales = random.halves(rows * blocks, 0.01);
    let halves = random.halves(rows * columns, 1.0);
    for (i, tile) in out.tiles.chunks_exact_mut(bytes).enumerate() {
        let inside = |r: usize| source(i, r) < rows;
        match encoding {
            TileEncoding::Q8 => tile_q8(
                columns,
                tile,
                |r, c| {
                    if inside(r) {
                        codes[source(i, r) * columns + c]
                    } else {
                        0
                    }
                },
                |r, b| {
                    if inside(r) {
                        scales[source(i, r) * blocks + b].to_bits()
                    } else {
                        0
                    }
                },
            ),
            _ => tile_f16(columns, tile, |r, c| {
                if inside(r) {
                    halves[source(i, r) * columns + c].to_bits()
                } else {
                    0
                }
            }),
        }
    }
    for (i, v) in out.values.iter_mut().enumerate() {
        *v = match encoding {
            TileEncoding::Q8 => {
                scales[i / columns * blocks + i % columns / 32].to_f64() * f64::from(codes[i])
            }
            _ => halves[i].to_f64(),
        };
    }
    out
}

/// `Σ w·x` and `Σ |w·x|` of row `row` of the matrix.
fn dot(m: &Matrix, row: usize, x: &[f16]) -> (f64, f64) {
    let products = m.values[row * x.len()..]
        .iter()
        .zip(x)
        .map(|(w, x)| w * x.to_f64());
    products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
}

const SHAPES: [(usize, usize, usize); 4] = [(40, 24, 1), (16, 192, 9), (136, 136, 70), (264, 72, 130)];

fn products(bench: &Bench) {
    let mut random = Random::new(11);
    for encoding in [TileEncoding::F16, TileEncoding::Q8] {
        for (outputs, columns, tokens) in SHAPES {
            let m = matrix(&mut random, encoding, outputs, columns, false);
            let input = random.halves((tokens + 3) * columns, 1.0);
            let bias = random.halves(outputs, 1.0);
            // Rows in another order, some of them twice.
            let which: Vec<u32> = (0..tokens).map(|_| random.below(tokens + 3) as u32).collect();
            let before = random.reals(tokens * outputs, 2.0);
            let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
            for form in LinearForm::ALL {
                let (output, hidden) = (bench.poisoned(tokens * outputs * 4), bench.upload(&before));
                let args = PrefillLinearArgs {
                    weights: bench.upload(&m.tiles),
                    input: bench.upload(&input),
                    which: bench.upload(&which),
                    bias: bench.upload(&bias),
                    output,
                    hidden,
                    tokens: tokens as u32,
                    columns: columns as u32,
                    outputs: outputs as u32,
                    unused: 0,
                };
                bench.launch(&form.launch(encoding, false, outputs, tokens), &args);
                let got = (bench.read(output, before.len()), bench.read(hidden, before.len()));
                for (i, y) in got.0.iter().enumerate() {
                    let (token, row) = (i / outputs, i % outputs);
                    let x = &input[which[token] as usize * columns..][..columns];
                    let (sum, size) = dot(&m, row, x);
                    let what = format!("{form:?} {encoding:?} {outputs}x{columns}, token {token}, row {row}");
                    close(
                        &what,
                        *y,
                        sum + bias[row].to_f64(),
                        sum_error(columns, size + 1.0),
                    );
                    assert_eq!(got.1[i], before[i] + y, "{what}: the residual stream");
                }
                let want = first.get_or_insert_with(|| got.clone());
                assert_eq!(bits(&want.0), bits(&got.0), "{form:?}: another form, other bits");
            }
        }
    }
}

fn pairs(bench: &Bench) {
    let mut random = Random::new(12);
    for encoding in [TileEncoding::F16, TileEncoding::Q8] {
        for (outputs, columns, tokens) in SHAPES {
            let m = matrix(&mut random, encoding, outputs * 2, columns, true);
            let input = random.halves(tokens * columns, 0.5);
            let mut first = None;
            for form in LinearForm::ALL {
                let output = bench.poisoned(tokens * outputs * 2);
                let args = PrefillLinearArgs {
                    weights: bench.upload(&m.tiles),
                    input: bench.upload(&input),
                    which: NULL,
                    bias: NULL,
                    output,
                    hidden: NULL,
                    tokens: tokens as u32,
                    columns: columns as u32,
                    outputs: outputs as u32,
                    unused: 0,
                };
                bench.launch(&form.launch(encoding, true, outputs, tokens), &args);
                let got = bench.read_f16(output, tokens * outputs);
                for (i, y) in got.iter().enumerate() {
                    let (token, o) = (i / outputs, i % outputs);
                    let x = &input[token * columns..][..columns];
                    let ((gate, g), (up, u)) = (dot(&m, o * 2, x), dot(&m, o * 2 + 1, x));
                    let silu = gate / (1.0 + (-gate).exp());
                    let want = silu * up;
                    // The slope of silu is at most 1.1.
                    let sums = 1.1 * sum_error(columns, g) * up.abs() + sum_error(columns, u) * silu.abs();
                    let error = want.abs() * 2f64.powi(-11) + 2f64.powi(-25) + 2.0 * sums + 1e-6 * want.abs();
                    close(
                        &format!("{form:?} {encoding:?} token {token}, output {o}"),
                        *y,
                        want,
                        error,
                    );
                }
                let want = first.get_or_insert_with(|| got.clone());
                assert_eq!(bits(want), bits(&got), "{form:?}: another form, other bits");
            }
        }
    }
}

/// A token's bits depend neither on how many there are nor on its place.
fn alone(bench: &Bench) {
    let mut random = Random::new(13);
    let (outputs, columns, tokens) = (72, 200, 67);
    for encoding in [TileEncoding::F16, TileEncoding::Q8] {
        let m = matrix(&mut random, encoding, outputs, columns, false);
        let (weights, input) = (bench.upload(&m.tiles), random.halves(tokens * columns, 1.0));
        let run = |form: LinearForm, input: &[f16]| {
            let tokens = input.len() / columns;
            let output = bench.poisoned(tokens * outputs * 4);
            let args = PrefillLinearArgs {
                weights,
                input: bench.upload(input),
                which: NULL,
                bias: NULL,
                output,
                hidden: NULL,
                tokens: tokens as u32,
                columns: columns as u32,
                outputs: outputs as u32,
                unused: 0,
            };
            bench.launch(&form.launch(encoding, false, outputs, tokens), &args);
            bench.read::<f32>(output, tokens * outputs)
        };
        let all = run(LinearForm::Middle, &input);
        for token in [0, 7, 8, 33, 63, 64, 66] {
            let own = run(LinearForm::Narrow, &input[token * columns..][..columns]);
            assert_eq!(
                bits(&own),
                bits(&all[token * outputs..][..outputs]),
                "{encoding:?}, token {token}"
            );
        }
    }
}

mod tests {
    crate::on_devices! {
        products, gpu_products;
        pairs, gpu_pairs;
        alone, gpu_alone;
    }
}
