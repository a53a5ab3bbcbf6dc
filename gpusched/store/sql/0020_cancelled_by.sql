-- Who cancelled a job: until now only its reason told, `cancelled by ann through MCP`.
ALTER TABLE jobs ADD COLUMN cancelled_by TEXT;
UPDATE jobs SET cancelled_by = CASE
    WHEN instr(reason_text, ' through ') > 0 THEN substr(reason_text, 14, instr(reason_text, ' through ') - 14)
    ELSE substr(reason_text, 14)
END WHERE reason = 'CancelledByUser' AND reason_text LIKE 'cancelled by %';
