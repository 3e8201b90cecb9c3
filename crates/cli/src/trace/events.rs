//! The events there are. A test compares them with those that the code emits.

/// Names, sorted, and what each is about.
pub(super) const NAMES: &[(&str, &str)] = &[
    ("bdrv_open_common", "a node was opened"),
    ("block_export_added", "an export begins"),
    ("block_export_removed", "an export has ended"),
    ("config_applied", "the file of disks was brought into force"),
    ("daemon_started", "everything is served"),
    ("daemon_stopping", "the end has come"),
    (
        "export_has_room",
        "no request of an export waits for room any more",
    ),
    (
        "export_request_done",
        "a request of an export's client has succeeded",
    ),
    (
        "export_request_failed",
        "a request of an export's client has failed",
    ),
    (
        "export_request_start",
        "a request of an export's client begins on the disk",
    ),
    (
        "export_waits_for_room",
        "a request of an export waits: its disk is full",
    ),
    (
        "handle_qmp_command",
        "a monitor's client asks for something",
    ),
    ("job_apply_verb", "a command is for a job"),
    ("job_completed", "a job is over"),
    (
        "job_state_transition",
        "a job goes from one state to another",
    ),
    ("monitor_qmp_respond", "a command was carried out"),
    ("nbd_accept_failed", "a client could not be taken in"),
    ("nbd_client_connected", "a client of the NBD server"),
    ("nbd_client_disconnected", "it has gone, or was given up"),
    (
        "nbd_client_handshake",
        "a connection to another server begins",
    ),
    ("nbd_client_handshake_failed", "it could not be made"),
    ("nbd_client_handshake_success", "it is there"),
    ("nbd_client_left", "a client has gone without an export"),
    (
        "nbd_co_send_chunk_error",
        "a request is answered with an error",
    ),
    (
        "nbd_negotiate_failed",
        "a client was given up before it had an export",
    ),
    (
        "nbd_negotiate_options_check_option",
        "a client asks for something before it has an export",
    ),
    ("nbd_negotiate_success", "a client has chosen an export"),
    ("nbd_receive_request", "a request has come"),
    (
        "nbd_reconnect_attempt",
        "a lost connection to another server is made anew",
    ),
    ("nbd_request_done", "a request has its last answer"),
    ("node_closed", "a node is gone"),
    (
        "node_drain_done",
        "none of a node's users has a request under way",
    ),
    ("node_drain_start", "a node's users are held up"),
    (
        "node_exchanged",
        "the users of one node go on with another one",
    ),
    (
        "node_filtered",
        "a job puts something in front of a node, or takes it away",
    ),
    ("node_let_go", "a node was closed, to be opened anew"),
    ("node_reopen_failed", "a node could not be opened anew"),
    ("node_reopened", "a node was opened anew"),
    ("qcow2_changes_stopped", "an image takes no more changes"),
    ("qcow2_commit_done", "an image's metadata is durable"),
    (
        "qcow2_commit_failed",
        "an image's metadata could not be made durable",
    ),
    ("qcow2_commit_start", "an image's metadata is written"),
    ("qcow2_discard_start_req", "an image gives space back"),
    (
        "qcow2_flush_done",
        "what was written to an image is durable",
    ),
    ("qcow2_flush_failed", "it is not"),
    ("qcow2_flush_start", "an image is flushed"),
    (
        "qcow2_pwrite_zeroes_start_req",
        "zeroes are written to an image",
    ),
    ("qcow2_readv_start_req", "an image is read"),
    ("qcow2_writev_start_req", "an image is written to"),
    ("qmp_event", "monitors' clients are told of something"),
    (
        "space_warning",
        "a file system with images on it is as full as a threshold, or no more",
    ),
    (
        "vhost_user_client_connected",
        "a guest of a vhost-user-blk export",
    ),
    ("vhost_user_client_disconnected", "it has gone"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_sorted() {
        assert!(NAMES.is_sorted_by(|one, next| one.0 < next.0));
    }
}
