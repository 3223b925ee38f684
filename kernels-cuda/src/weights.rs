//! The non-routed weights on the device: matrices as tiles, vectors as they are, the router transposed.

use half::f16;
use horizon_core::dense::{DenseMatrix, DenseStore};
use horizon_core::ids::LayerId;
use horizon_core::roles::{DenseRole, LayerRole as L};
use horizon_core::spec::{FeedForward, ModelSpec};
use rayon::prelude::*;

use crate::arena::{Arena, Carver, Piece};
use crate::driver::{DevicePtr, DriverError, SharedDriver, Stream};
use crate::shape::Shape;
use crate::tiling::{TILE_ROWS, TileEncoding, tile_f16, tile_q8};

/// Where a layer's weights lie; null where the model has none.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerWeights {
    /// Norm before attention, `[hidden]`.
    pub attention_norm: DevicePtr,
    /// Queries, keys and values as one matrix of tiles.
    pub qkv: DevicePtr,
    /// Their biases, joined.
    pub qkv_bias: DevicePtr,
    /// Norm of queries.
    pub q_norm: DevicePtr,
    /// Norm of keys.
    pub k_norm: DevicePtr,
    /// Output projection, tiles.
    pub output: DevicePtr,
    /// Its bias.
    pub output_bias: DevicePtr,
    /// Norm before the feed-forward.
    pub feed_forward_norm: DevicePtr,
    /// Router, `[hidden, experts + gate]`.
    pub router: DevicePtr,
    /// Gate and up of the shared expert or the dense feed-forward, pair tiles.
    pub pairs: DevicePtr,
    /// Its down matrix, tiles.
    pub down: DevicePtr,
    /// Its width; 0: none.
    pub width: usize,
}

/// Where everything lies.
pub struct DeviceWeights {
    /// Layers in order.
    pub layers: Vec<LayerWeights>,
    /// Norm before the head.
    pub final_norm: DevicePtr,
    /// Output head, tiles.
    pub head: DevicePtr,
    _arena: Arena,
}

/// How the rows of a tiled matrix follow from its sources.
enum Rows {
    /// One source after another.
    Joined,
    /// Eight rows of the first, eight of the second, and so on.
    Pairs,
}

/// One thing to upload.
enum Item {
    /// FP16 vectors, one after another.
    Vectors(Vec<DenseRole>),
    /// Matrices as tiles.
    Tiles(Vec<DenseRole>, Rows),
    /// `[outputs, hidden]` matrices, joined and transposed.
    Transposed(Vec<DenseRole>),
}

/// Names a field of a layer.
type Field = fn(&mut LayerWeights) -> &mut DevicePtr;

fn layer_items(spec: &ModelSpec, layer: LayerId) -> Vec<(Field, Item)> {
    let role = |r| DenseRole::Layer(layer, r);
    let a = &spec.attention;
    let mut items: Vec<(Field, Item)> = vec![
        (
            |w| &mut w.attention_norm,
            Item::Vectors(vec![role(L::AttentionNorm)]),
        ),
        (
            |w| &mut w.qkv,
            Item::Tiles(vec![role(L::Query), role(L::Key), role(L::Value)], Rows::Joined),
        ),
        (
            |w| &mut w.output,
            Item::Tiles(vec![role(L::Output)], Rows::Joined),
        ),
        (
            |w| &mut w.feed_forward_norm,
            Item::Vectors(vec![role(L::FeedForwardNorm)]),
        ),
    ];
    if a.qkv_bias {
        let biases = vec![role(L::QueryBias), role(L::KeyBias), role(L::ValueBias)];
        items.push((|w| &mut w.qkv_bias, Item::Vectors(biases)));
    }
    if a.qk_norm != horizon_core::spec::QkNorm::None {
        items.push((|w| &mut w.q_norm, Item::Vectors(vec![role(L::QueryNorm)])));
        items.push((|w| &mut w.k_norm, Item::Vectors(vec![role(L::KeyNorm)])));
    }
    if a.output_bias {
        items.push((|w| &mut w.output_bias, Item::Vectors(vec![role(L::OutputBias)])));
    }
    let mlp = match &spec.layers[layer.index()].feed_forward {
        FeedForward::Dense { .. } => Some([L::DenseGate, L::DenseUp, L::DenseDown]),
        FeedForward::Moe(m) => {
            let mut router = vec![role(L::Router)];
            if m.shared.as_ref().is_some_and(|s| s.gated) {
                router.push(role(L::SharedExpertGate));
            }
            items.push((|w| &mut w.router, Item::Transposed(router)));
            m.shared
                .as_ref()
                .map(|_| [L::SharedGate, L::SharedUp, L::SharedDown])
        }
    };
    if let Some([gate, up, down]) = mlp {
        items.push((
            |w| &mut w.pairs,
            Item::Tiles(vec![role(gate), role(up)], Rows::Pairs),
        ));
        items.push((|w| &mut w.down, Item::Tiles(vec![role(down)], Rows::Joined)));
    }
    items
}

fn shape_of(spec: &ModelSpec, role: DenseRole) -> (usize, usize) {
    let (h, a) = (spec.hidden, &spec.attention);
    let (q, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
    let DenseRole::Layer(layer, role) = role else {
        return match role {
            DenseRole::FinalNorm => (1, h),
            _ => (spec.vocab, h),
        };
    };
    let norm = |n| {
        if a.qk_norm == horizon_core::spec::QkNorm::PerHead {
            a.head_dim
        } else {
            n
        }
    };
    let (width, experts) = match &spec.layers[layer.index()].feed_forward {
        FeedForward::Dense { width } => (*width, 0),
        FeedForward::Moe(m) => (m.shared.as_ref().map_or(0, |s| s.width), m.experts),
    };
    match role {
        L::AttentionNorm | L::FeedForwardNorm | L::OutputBias | L::SharedExpertGate => (1, h),
        L::Query => (q, h),
        L::Key | L::Value => (kv, h),
        L::QueryBias => (1, q),
        L::KeyBias | L::ValueBias => (1, kv),
        L::QueryNorm => (1, norm(q)),
        L::KeyNorm => (1, norm(kv)),
        L::Output => (h, q),
        L::Router => (experts, h),
        L::SharedGate | L::SharedUp | L::DenseGate | L::DenseUp => (width, h),
        L::SharedDown | L::DenseDown => (h, width),
    }
}

fn item_bytes(spec: &ModelSpec, dense: TileEncoding, item: &Item) -> usize {
    let rows = |roles: &[DenseRole]| roles.iter().map(|r| shape_of(spec, *r).0).sum::<usize>();
    match item {
        Item::Vectors(roles) => roles.iter().map(|r| shape_of(spec, *r).1 * 2).sum(),
        Item::Tiles(roles, _) => dense.matrix_bytes(rows(roles), shape_of(spec, roles[0]).1),
        Item::Transposed(roles) => rows(roles) * spec.hidden * 2,
    }
}

/// Sizes of the weights, before anything is allocated.
pub struct WeightsPlan {
    carver: Carver,
    layers: Vec<Vec<(Field, Item, Piece)>>,
    final_norm: Piece,
    head: Piece,
}

impl WeightsPlan {
    /// The weights of `spec` with matrices in `shape.dense`.
    #[must_use]
    pub fn new(spec: &ModelSpec, shape: &Shape) -> Self {
        let mut carver = Carver::new("non-routed weights");
        let layers = (0u32..)
            .map(LayerId)
            .take(spec.layers.len())
            .map(|layer| {
                let items = layer_items(spec, layer).into_iter();
                items
                    .map(|(field, item)| {
                        let piece = carver.take(item_bytes(spec, shape.dense, &item), 1);
                        (field, item, piece)
                    })
                    .collect()
            })
            .collect();
        let final_norm = carver.take(spec.hidden, 2);
        let head = carver.take(shape.dense.matrix_bytes(spec.vocab, spec.hidden), 1);
        Self {
            carver,
            layers,
            final_norm,
            head,
        }
    }

    /// What they are, and their bytes.
    #[must_use]
    pub fn ledger(&self) -> (&'static str, u64) {
        self.carver.ledger()
    }

    /// Allocates them and copies them there.
    ///
    /// # Errors
    /// [`DriverError`].
    ///
    /// # Panics
    /// When `store` lacks a weight of the specification; the caller has checked.
    pub fn upload(
        &self,
        spec: &ModelSpec,
        shape: &Shape,
        store: &DenseStore,
        driver: &SharedDriver,
        stream: Stream,
    ) -> Result<DeviceWeights, DriverError> {
        let arena = self.carver.allocate(driver)?;
        let up = Upload {
            store,
            dense: shape.dense,
            driver,
            stream,
            hidden: spec.hidden,
        };
        let mut layers = Vec::with_capacity(self.layers.len());
        for (items, l) in self.layers.iter().zip(&spec.layers) {
            let mut weights = LayerWeights {
                width: match &l.feed_forward {
                    FeedForward::Dense { width } => *width,
                    FeedForward::Moe(m) => m.shared.as_ref().map_or(0, |s| s.width),
                },
                ..LayerWeights::default()
            };
            for (field, item, piece) in items {
                let at = arena.at(*piece);
                up.item(item, at, piece.bytes)?;
                *field(&mut weights) = at;
            }
            layers.push(weights);
        }
        let (final_norm, head) = (arena.at(self.final_norm), arena.at(self.head));
        up.item(
            &Item::Vectors(vec![DenseRole::FinalNorm]),
            final_norm,
            self.final_norm.bytes,
        )?;
        up.item(
            &Item::Tiles(vec![store.head_role()], Rows::Joined),
            head,
            self.head.bytes,
        )?;
        Ok(DeviceWeights {
            layers,
            final_norm,
            head,
            _arena: arena,
        })
    }
}

struct Upload<'a> {
    store: &'a DenseStore,
    dense: TileEncoding,
    driver: &'a SharedDriver,
    stream: Stream,
    hidden: usize,
}

impl Upload<'_> {
    fn item(&self, item: &Item, to: DevicePtr, bytes: usize) -> Result<(), DriverError> {
        let vector = |role: &DenseRole| self.store.get(*role).expect("checked when the model was opened");
        let mut out = vec![0u8; bytes];
        match item {
            Item::Vectors(roles) => {
                let values: Vec<f16> = roles.iter().flat_map(|r| vector(r).iter().copied()).collect();
                out.copy_from_slice(bytemuck::cast_slice(&values));
            }
            Item::Transposed(roles) => {
                let values: Vec<&[f16]> = roles
                    .iter()
                    .flat_map(|r| vector(r).chunks_exact(self.hidden))
                    .collect();
                let columns = values.len();
                let transposed: &mut [f16] = bytemuck::cast_slice_mut(&mut out);
                for (i, t) in transposed.iter_mut().enumerate() {
                    *t = values[i % columns][i / columns];
                }
            }
            Item::Tiles(roles, rows) => self.tiles(roles, rows, &mut out),
        }
        // SAFETY: `to` has `bytes` bytes by the plan, and `out` lives until the stream has been synchronized.
        #[expect(unsafe_code, reason = "a copy between raw addresses")]
        unsafe {
            self.driver.copy_to_device(self.stream, to, out.as_ptr(), bytes)?;
        }
        self.driver.synchronize(self.stream)
    }

    fn tiles(&self, roles: &[DenseRole], rows: &Rows, out: &mut [u8]) {
        let matrices: Vec<DenseMatrix<'_>> = roles
            .iter()
            .map(|r| self.store.matrix(*r).expect("checked when the model was opened"))
            .collect();
        let columns = matrices[0].cols();
        let source = |row: usize| -> Option<(usize, usize)> {
            match rows {
                Rows::Pairs => {
                    let (matrix, of) = (row % 16 / 8, row / 16 * 8 + row % 8);
                    (of < matrices[matrix].rows()).then_some((matrix, of))
                }
                Rows::Joined => {
                    let mut rest = row;
                    for (i, m) in matrices.iter().enumerate() {
                        if rest < m.rows() {
                            return Some((i, rest));
                        }
                        rest -= m.rows();
                    }
                    None
                }
            }
        };
        out.par_chunks_exact_mut(self.dense.tile_bytes(columns))
            .enumerate()
            .for_each(|(i, tile)| {
                let place: [_; TILE_ROWS] = std::array::from_fn(|r| source(i * TILE_ROWS + r));
                match self.dense {
                    TileEncoding::F16 => tile_f16(columns, tile, |r, c| match place[r] {
                        Some((m, row)) => match matrices[m] {
                            DenseMatrix::F16 { values, cols } => values[row * cols + c].to_bits(),
                            DenseMatrix::Q8(_) => unreachable!("one form for all matrices"),
                        },
                        None => 0,
                    }),
                    TileEncoding::Q8 => tile_q8(
                        columns,
                        tile,
                        |r, c| match place[r].map(|(m, row)| (&matrices[m], row)) {
                            Some((DenseMatrix::Q8(q), row)) => q.codes[row * columns + c],
                            _ => 0,
                        },
                        |r, b| match place[r].map(|(m, row)| (&matrices[m], row)) {
                            Some((DenseMatrix::Q8(q), row)) => {
                                q.scales[row * columns.div_ceil(32) + b].to_bits()
                            }
                            _ => 0,
                        },
                    ),
                    TileEncoding::Int4 { .. } => unreachable!("non-routed weights are never INT4"),
                }
            });
    }
}
