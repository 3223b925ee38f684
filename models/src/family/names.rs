//! Tensor names that the families share, and the one part in which they differ: the mixture-of-experts block.

use horizon_core::roles::{DenseRole, ExpertMatrix, ExpertRole, LayerRole, TensorNames};

/// Names of a decoder in the hub's usual layout.
pub(super) struct HubNames {
    /// The mixture-of-experts block within a layer.
    pub moe_block: &'static str,
    /// Gate, up and down within an expert.
    pub expert: [&'static str; 3],
}

/// `mlp` with `gate_proj`, `up_proj`, `down_proj`.
pub(super) const USUAL: HubNames = HubNames {
    moe_block: "mlp",
    expert: ["gate_proj", "up_proj", "down_proj"],
};

impl TensorNames for HubNames {
    fn dense(&self, role: DenseRole) -> String {
        match role {
            DenseRole::Embedding => "model.embed_tokens.weight".to_owned(),
            DenseRole::FinalNorm => "model.norm.weight".to_owned(),
            DenseRole::OutputHead => "lm_head.weight".to_owned(),
            DenseRole::Layer(layer, LayerRole::Router) => {
                format!("model.layers.{}.{}.gate.weight", layer.0, self.moe_block)
            }
            DenseRole::Layer(layer, role) => format!("model.layers.{}.{}", layer.0, within_layer(role)),
        }
    }

    fn expert(&self, role: ExpertRole) -> String {
        let [gate, up, down] = self.expert;
        let matrix = match role.matrix {
            ExpertMatrix::Gate => gate,
            ExpertMatrix::Up => up,
            ExpertMatrix::Down => down,
        };
        format!(
            "model.layers.{}.{}.experts.{}.{matrix}.weight",
            role.layer.0, self.moe_block, role.expert.0
        )
    }
}

fn within_layer(role: LayerRole) -> &'static str {
    match role {
        LayerRole::AttentionNorm => "input_layernorm.weight",
        LayerRole::Query => "self_attn.q_proj.weight",
        LayerRole::QueryBias => "self_attn.q_proj.bias",
        LayerRole::QueryNorm => "self_attn.q_norm.weight",
        LayerRole::Key => "self_attn.k_proj.weight",
        LayerRole::KeyBias => "self_attn.k_proj.bias",
        LayerRole::KeyNorm => "self_attn.k_norm.weight",
        LayerRole::Value => "self_attn.v_proj.weight",
        LayerRole::ValueBias => "self_attn.v_proj.bias",
        LayerRole::Output => "self_attn.o_proj.weight",
        LayerRole::OutputBias => "self_attn.o_proj.bias",
        LayerRole::FeedForwardNorm => "post_attention_layernorm.weight",
        LayerRole::Router => "mlp.gate.weight",
        LayerRole::SharedGate => "mlp.shared_expert.gate_proj.weight",
        LayerRole::SharedUp => "mlp.shared_expert.up_proj.weight",
        LayerRole::SharedDown => "mlp.shared_expert.down_proj.weight",
        LayerRole::SharedExpertGate => "mlp.shared_expert_gate.weight",
        LayerRole::DenseGate => "mlp.gate_proj.weight",
        LayerRole::DenseUp => "mlp.up_proj.weight",
        LayerRole::DenseDown => "mlp.down_proj.weight",
    }
}
