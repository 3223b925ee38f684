//! The heart of Horizon RunMap: the words, the formats and the boundary that every backend implements.
//!
//! Data flows one way: checkpoint → pack → artifact → expert image → provider → executor → step → sampler.
//! This crate depends on no other crate of the workspace and knows no tokenizer, no HTTP and no GPU API.
//!
//! | module | subject |
//! | --- | --- |
//! | [`ids`] | newtypes for layers, experts, generations |
//! | [`dtype`] | storage types and exact conversions |
//! | [`spec`] | [`spec::ModelSpec`]: a model as data |
//! | [`roles`] | what a dense tensor is for, and the shapes a spec asks for |
//! | [`memory`] | anonymous memory that tensors live in |
//! | [`dense`] | the non-routed weights |
//! | [`dense_q8`] | 8-bit integers in blocks of 32: the second form of non-routed matrices |
//! | [`qpacked`] | the INT4 block format |
//! | [`record`] | one expert's bytes, canonical and tiled |
//! | [`image`] | all expert records of a model, tiled, in host memory |
//! | [`artifact`] | the packed model on disk |
//! | [`stage`] | names of the stages of a step; taps |
//! | [`provider`] | where experts are: leases on expert records |
//! | [`backend`] | plan, open, enqueue, finish |
//! | [`observe`] | counts that say whether they were counted |
//! | [`transport`] | slots, staging and copies: a device as the cache sees it |
//! | [`cpu`] | the scalar reference and the fast CPU backend |
//! | [`synthetic`] | checkpoints with made-up weights, for tests and measurements |

pub mod artifact;
pub mod backend;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod cpu;
pub mod dense;
pub mod dense_q8;
pub mod dtype;
pub mod ids;
pub mod image;
pub mod memory;
pub mod observe;
pub mod provider;
pub mod qpacked;
pub mod record;
pub mod roles;
pub mod spec;
pub mod stage;
pub mod synthetic;
pub mod transport;
