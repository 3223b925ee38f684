//! The commands, one file each.

pub mod about;
pub mod answer;
pub mod bench;
pub mod cache;
pub mod chat;
pub mod eval;
pub mod floor;
pub mod inspect;
pub mod inspect_text;
pub mod model;
pub mod pack;
pub mod report;
pub mod run;
pub mod trace;
