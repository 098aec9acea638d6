//! Writes a placement into a model: ONNX's own place for it is the stage of a pipeline.

use std::collections::HashMap;

use super::Model;
use super::proto::{DeviceConfigurationProto, NodeDeviceConfigurationProto};

/// The name of the configuration that this crate writes.
const CONFIGURATION: &str = "pleach";

/// The first version of the form that has configurations.
const CONFIGURATION_IR_VERSION: i64 = 11;

impl Model {
    /// The model with a stage for each node that has one, by the name of the node's first output.
    /// It replaces the stages that the model has.
    #[must_use]
    pub fn with_stages(&self, ranks: u32, stages: &HashMap<&str, u32>) -> Self {
        let mut model = self.clone();
        let proto = &mut model.proto;
        proto.ir_version = Some(proto.ir_version().max(CONFIGURATION_IR_VERSION));
        proto.configuration.retain(|configuration| configuration.name() != CONFIGURATION);
        proto.configuration.push(DeviceConfigurationProto {
            name: Some(CONFIGURATION.to_owned()),
            num_devices: i32::try_from(ranks).ok(),
            device: (0..ranks).map(|rank| format!("rank {rank}")).collect(),
        });
        for node in proto.graph.iter_mut().flat_map(|graph| &mut graph.node) {
            node.device_configurations.retain(|own| own.configuration_id() != CONFIGURATION);
            node.device_configurations.iter_mut().for_each(|own| own.pipeline_stage = None);
            let output = node.output.iter().find(|name| !name.is_empty());
            if let Some(&stage) = output.and_then(|name| stages.get(name.as_str())) {
                node.device_configurations.push(NodeDeviceConfigurationProto {
                    configuration_id: Some(CONFIGURATION.to_owned()),
                    sharding_spec: Vec::new(),
                    pipeline_stage: i32::try_from(stage).ok(),
                });
            }
        }
        model
    }
}
