//! The kernels of a model, loaded, and the shared memory that they ask for.

use std::collections::BTreeMap;

use super::Executor;
use crate::args::PersistentLayer;
use crate::driver::{DeviceInfo, DriverError, Kernel, SharedDriver};
use crate::executors::grouped_t3::{GroupedForm, Groups};
use crate::prefill::{self, Form, LinearForm};
use crate::shape::{Shape, TOKENS, activation_stride, u32_of};
use crate::tiling::TileEncoding;

/// A kernel with the name it is known by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub(super) name: &'static str,
    pub(super) kernel: Kernel,
}

/// The kernels of a model, loaded.
pub struct Functions {
    pub(super) embed: Function,
    pub(super) norm_linear: Function,
    pub(super) append: Function,
    pub(super) attend: Function,
    pub(super) project: Function,
    pub(super) pair_linear: Function,
    pub(super) linear: Function,
    pub(super) combine: Function,
    pub(super) head: Function,
    pub(super) gate_up: Function,
    pub(super) down: Function,
    /// Absent where a block's shared memory is too small for the model.
    pub(super) fused: Option<Function>,
    pub(super) persistent: Option<Function>,
    /// Blocks of the head's grid.
    pub(super) head_blocks: u32,
    pub(super) multiprocessors: u32,
    /// Kernels of steps of many rows, by name.
    many: BTreeMap<&'static str, Kernel>,
}

/// Threads of a block of most kernels.
pub(super) const THREADS: u32 = 256;
pub(super) const ATTEND_THREADS: u32 = 128;

impl Functions {
    /// Loads every kernel that steps of `shape` may launch, and allows the shared memory that it asks for.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn load(driver: &SharedDriver, shape: &Shape) -> Result<Self, DriverError> {
        let get = |name: &'static str| {
            Ok::<_, DriverError>(Function {
                name,
                kernel: driver.kernel(name)?,
            })
        };
        let q8 = shape.dense == TileEncoding::Q8;
        let of = |f16, q8_name| get(if q8 { q8_name } else { f16 });
        let packed = matches!(shape.record.map(|r| r.encoding), Some(TileEncoding::Int4 { .. }));
        let attend = match shape.padded {
            0..=32 => "attend_32",
            33..=64 => "attend_64",
            65..=128 => "attend_128",
            _ => "attend_256",
        };
        let mut functions = Self {
            embed: get("embed")?,
            norm_linear: of("norm_linear_f16", "norm_linear_q8")?,
            append: get("append_kv")?,
            attend: get(attend)?,
            project: of("project_f16", "project_q8")?,
            pair_linear: of("pair_linear_f16", "pair_linear_q8")?,
            linear: of("linear_f16", "linear_q8")?,
            combine: get("combine")?,
            head: of("head_f16", "head_q8")?,
            gate_up: get(if packed {
                "scalar_gate_up_int4"
            } else {
                "scalar_gate_up_f16"
            })?,
            down: get(if packed {
                "scalar_down_int4"
            } else {
                "scalar_down_f16"
            })?,
            fused: None,
            persistent: None,
            head_blocks: 0,
            multiprocessors: 1,
            many: BTreeMap::new(),
        };
        for (function, shared) in [
            (functions.norm_linear, linear_shared(shape.hidden, TOKENS)),
            (functions.append, append_shared(shape)),
            (functions.attend, attend_shared(shape)),
            (functions.project, project_shared(shape, TOKENS)),
            (functions.pair_linear, linear_shared(shape.hidden, TOKENS)),
            (functions.linear, linear_shared(shape.dense_width, TOKENS)),
            (functions.head, linear_shared(shape.hidden, TOKENS)),
            (functions.gate_up, activation_stride(shape.hidden) + 256),
            (functions.down, activation_stride(shape.width()) + 256),
        ] {
            driver.allow_shared(function.kernel, u32_of(shared))?;
        }
        functions.load_limited(driver, shape, packed, q8)?;
        let shared = u32_of(linear_shared(shape.hidden, 1));
        let resident = driver.resident_blocks(functions.head.kernel, THREADS, shared)?;
        functions.multiprocessors = driver.info().multiprocessors;
        functions.head_blocks = (resident * driver.info().multiprocessors).max(1);
        functions.load_many(driver, shape)?;
        Ok(functions)
    }

    /// The kernels that not every card has room for.
    fn load_limited(
        &mut self,
        driver: &SharedDriver,
        shape: &Shape,
        packed: bool,
        q8: bool,
    ) -> Result<(), DriverError> {
        let [fused, persistent] = match (packed, q8) {
            (true, false) => ["top4_fused_v1_int4_f16", "persistent_v1_int4_f16"],
            (true, true) => ["top4_fused_v1_int4_q8", "persistent_v1_int4_q8"],
            (false, false) => ["top4_fused_v1_f16_f16", "persistent_v1_f16_f16"],
            (false, true) => ["top4_fused_v1_f16_q8", "persistent_v1_f16_q8"],
        };
        for (executor, name, to) in [
            (Executor::Top4FusedV1, fused, &mut self.fused),
            (Executor::PersistentV1, persistent, &mut self.persistent),
        ] {
            if executor.limits(shape, driver.info()).is_ok() {
                let kernel = driver.kernel(name)?;
                let shared = executor.shared_bytes(shape, driver.info());
                driver.allow_shared(kernel, u32_of(shared))?;
                *to = Some(Function { name, kernel });
            }
        }
        Ok(())
    }

    /// Every form of every kernel of steps of many rows.
    fn load_many(&mut self, driver: &SharedDriver, shape: &Shape) -> Result<(), DriverError> {
        let (gates, experts) = (shape.router_columns() - shape.experts(), shape.experts());
        let mut forms = vec![
            prefill::norm(1),
            prefill::qkv(1),
            prefill::attention(1, shape.heads, shape.padded),
            prefill::router(1, experts, gates),
        ];
        for form in LinearForm::ALL {
            forms.extend([false, true].map(|pairs| form.launch(shape.dense, pairs, 16, 1)));
        }
        if let Some(groups) = groups(shape, 1) {
            forms.push(groups.index());
            for form in GroupedForm::ALL {
                forms.extend([groups.gate_up(form), groups.down(form)]);
            }
        }
        for Form { name, shared, .. } in forms {
            let kernel = driver.kernel(name)?;
            driver.allow_shared(kernel, shared)?;
            self.many.insert(name, kernel);
        }
        Ok(())
    }

    /// The kernel of a form.
    pub(super) fn of(&self, form: &Form) -> Function {
        Function {
            name: form.name,
            kernel: *self
                .many
                .get(form.name)
                .expect("every form is loaded when the model is opened"),
        }
    }
}

/// Experts a token that the persistent kernel has room for.
const MOST_CHOSEN: usize = 64;

impl Executor {
    /// Shared memory that a block of its own kernels takes; 0 where every card has enough.
    pub(super) fn shared_bytes(self, shape: &Shape, info: &DeviceInfo) -> usize {
        match self {
            Self::Scalar | Self::GroupedT3 => 0,
            Self::Top4FusedV1 => fused_shared(shape),
            Self::PersistentV1 => persistent_shared(shape, info.multiprocessors as usize),
        }
    }

    /// Whether it can compute a model on a card.
    ///
    /// # Errors
    /// The limit, in words.
    pub fn limits(self, shape: &Shape, info: &DeviceInfo) -> Result<(), String> {
        let (needed, most) = (self.shared_bytes(shape, info), info.shared_per_block);
        if needed > most {
            return Err(format!(
                "executor {} needs {needed} bytes of shared memory a block for this model; {} has {most}",
                self.name(),
                info.name
            ));
        }
        if self == Self::PersistentV1 && shape.top_k() > MOST_CHOSEN {
            return Err(format!(
                "executor {} takes at most {MOST_CHOSEN} experts a token; the model uses {}",
                self.name(),
                shape.top_k()
            ));
        }
        Ok(())
    }
}

/// What `grouped-t3` is launched for, if the model has routed experts.
pub(super) fn groups(shape: &Shape, rows: usize) -> Option<Groups> {
    shape.record.map(|record| Groups {
        rows,
        top_k: shape.top_k(),
        experts: shape.experts(),
        hidden: shape.hidden,
        width: shape.width(),
        encoding: record.encoding,
    })
}

/// Shared memory of the linear kernels: activations, sums of eight warps, a float a warp, a word.
pub(super) fn linear_shared(columns: usize, tokens: usize) -> usize {
    tokens * activation_stride(columns) + 8 * 128 * 4 + 64
}

/// Shared memory of attention in `warps` warps: query, key, value; two floats a warp, four words; sums of each warp.
fn attend_shared_of(shape: &Shape, warps: usize) -> usize {
    (3 * shape.padded + 2 * warps + 4 + warps * (shape.padded + 2)) * 4
}

pub(super) fn append_shared(shape: &Shape) -> usize {
    (3 * shape.padded + 8) * 4
}

pub(super) fn attend_shared(shape: &Shape) -> usize {
    attend_shared_of(shape, ATTEND_THREADS as usize / 32)
}

pub(super) fn project_shared(shape: &Shape, tokens: usize) -> usize {
    let product = tokens * activation_stride(shape.attended()) + (8 * 128 + 256) * 4 + 64;
    let wide = shape.router_columns() + 1;
    product.max((9 * wide + shape.experts() + 8) * 4)
}

pub(super) fn fused_shared(shape: &Shape) -> usize {
    let routed = shape.top_k().min(8) * activation_stride(shape.width());
    let shared = activation_stride(shape.dense_width);
    activation_stride(shape.hidden).max(routed.max(shared)) + (8 * 16) * 4 + 64
}

/// Warps of the persistent kernel, and slots of each warp's ring.
const PERSISTENT_WARPS: usize = 16;
const PERSISTENT_SLOTS: usize = 5;
/// Bytes of `Fixed` of the persistent kernel.
const PERSISTENT_FIXED: usize = 3 * 256 + 32 + PERSISTENT_WARPS * 9 * 32;

/// Shared memory of the persistent kernel: rings, layers, what is fixed, sums, and room for the part that needs most.
pub(super) fn persistent_shared(shape: &Shape, blocks: usize) -> usize {
    let rings = PERSISTENT_WARPS * PERSISTENT_SLOTS * (2048 + 256);
    let fixed = shape.layers * size_of::<PersistentLayer>() + PERSISTENT_FIXED + 8 * PERSISTENT_WARPS * 64;
    let attend = attend_shared_of(shape, PERSISTENT_WARPS);
    let project = activation_stride(shape.attended()) + 8 * 16 * 2 * 4;
    let wide = shape.router_columns() + 1;
    let route = activation_stride(shape.hidden) + ((PERSISTENT_WARPS + 1) * wide + 2 * shape.experts()) * 4;
    let down = shape.top_k() * activation_stride(shape.width())
        + activation_stride(shape.dense_width)
        + shape.hidden_tiles().div_ceil(blocks) * 64;
    rings + fixed + attend.max(project).max(route).max(down)
}

#[cfg(test)]
mod tests {
    use horizon_core::backend::{Activations, Regime};
    use horizon_core::dense::DenseFormat;
    use horizon_core::qpacked::BlockSize;
    use horizon_core::record::ExpertEncoding;
    use horizon_core::synthetic;

    use super::*;

    /// A card with the shared memory of capabilities 8.6, 8.9 and 12.0, or of 9.0.
    fn card(shared_per_block: usize) -> DeviceInfo {
        DeviceInfo {
            name: "a card".into(),
            capability: 90,
            multiprocessors: 100,
            shared_per_block,
            shared_per_multiprocessor: shared_per_block + 1024,
            l2_bytes: 1 << 20,
            memory_bytes: 1 << 30,
            driver: 12080,
        }
    }

    #[test]
    fn an_executor_is_refused_where_its_shared_memory_does_not_fit() {
        for name in ["olmoe", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b"] {
            let spec = synthetic::Shape::named(name)
                .and_then(|s| s.model_spec())
                .expect("a published shape");
            let regime = Regime {
                activations: Activations::F16,
                context: 4096,
                sequences: 1,
                max_rows: 512,
            };
            let encoding = ExpertEncoding::Qpacked {
                block: BlockSize::B256,
            };
            let shape =
                Shape::new(&spec, encoding, DenseFormat::F16, &regime).expect("a shape that is supported");
            for executor in Executor::ALL {
                assert_eq!(executor.limits(&shape, &card(227 << 10)), Ok(()), "{name}");
                let small = executor.limits(&shape, &card(99 << 10));
                assert_eq!(
                    small.is_err(),
                    executor == Executor::PersistentV1,
                    "{name}: {small:?}"
                );
            }
        }
    }
}
